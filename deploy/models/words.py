"""Nothing -> the words that generated tasks are made of; one in five is kept for held-out items."""

from __future__ import annotations


def _words(text: str) -> list[str]:
    return text.split()


FIRST_NAMES = _words("""
Ada Adrian Aisha Alma Amara Andrea Anton Aria Astrid Bastian Beatriz Bela Bruno Camila Carla Cedric Chloe Clara Dalia
Daniel Daria David Diego Dina Edith Elena Elias Emil Erika Esra Farid Felix Fiona Flora Gabriel Greta Hana Hannah Hugo
Ida Ines Irene Isaac Ivan Jana Jasper Joana Jonas Julia Karim Klara Lara Laura Leo Lena Liam Lina Lucas Lydia Maja
Marco Maria Marta Mateo Mila Mina Nadia Naomi Nils Nina Noah Nora Olga Oliver Omar Oscar Paula Petra Pablo Rafael Rania
Rita Robin Rosa Ruben Samir Sara Sofia Stefan Tara Theo Tilda Tomas Vera Victor Viola Walter Yara Yusuf Zoe
""")

LAST_NAMES = _words("""
Abbott Almeida Andersen Archer Baker Barros Becker Bennett Berg Blanco Bosch Brandt Brooks Carter Castro Chandra Chen
Costa Cruz Dahl Diaz Dubois Eriksen Evans Faber Ferrari Fischer Flores Foster Garcia Gomez Grant Haas Hansen Hoffman
Holm Ibarra Ito Jansen Jensen Kaya Keller Khan Klein Kovacs Kumar Larsen Lopez Lund Marino Martin Mendes Meyer Moreau
Moretti Nagy Navarro Neumann Novak Okafor Olsen Ortega Palmer Park Patel Pereira Petrov Pinto Porter Quinn Ramos Reyes
Ricci Rivera Romano Rossi Ruiz Santos Sato Schmidt Silva Singh Sousa Stone Suzuki Tanaka Torres Turner Vargas Vega
Vogel Wagner Walsh Weber Wolf Yamada Young Ziegler
""")

CITIES = _words("""
Amsterdam Ankara Athens Austin Bangkok Barcelona Basel Belgrade Bergen Berlin Bilbao Bogota Boston Bremen Brussels
Budapest Cairo Chicago Cologne Copenhagen Dakar Dallas Delhi Denver Dublin Florence Geneva Ghent Glasgow Hamburg Hanoi
Havana Helsinki Houston Istanbul Jakarta Kyoto Lagos Leipzig Lima Lisbon London Lyon Madrid Malaga Manila Marseille
Melbourne Milan Montreal Mumbai Munich Nairobi Naples Oslo Ottawa Paris Porto Prague Quito Riga Rome Rotterdam Santiago
Seattle Seoul Sofia Stockholm Sydney Tallinn Tokyo Toronto Turin Utrecht Valencia Vienna Vilnius Warsaw Zagreb Zurich
""")

JOBS = _words("""
accountant actor architect baker barber biologist butcher carpenter chemist cook courier dentist designer doctor driver
editor electrician engineer farmer florist gardener geologist judge lawyer librarian mechanic miner musician nurse
painter pharmacist photographer pilot plumber printer sailor scientist sculptor singer surgeon tailor teacher translator
waiter welder writer
""")

PRODUCTS = _words("""
backpack basket battery bench bicycle blanket blender bottle bracket brush bucket cabinet camera candle carpet chair
charger clock compass curtain cushion desk drill fan filter guitar hammer headset helmet jacket kettle keyboard ladder
lamp lantern laptop mattress microphone mirror monitor mouse notebook oven pillow pencil phone printer radio router
scanner scarf screwdriver shelf sofa speaker stapler stove suitcase table tablet telescope tent toaster tripod umbrella
vase wallet watch
""")

COLORS = _words("black blue brown gold gray green orange pink purple red silver teal violet white yellow")

NOUNS = _words("""
account article asset batch bill booking branch call camera case client contract course customer deal delivery device
document driver employee event flight game guest house invoice item job lecture lesson letter loan machine match meeting
member message movie offer order package page parcel patient payment person photo plan player product project recipe
record report request review room route sale sensor server session shipment shop site song station student supplier task
team ticket tool train trip user vehicle visit ward worker
""")

NUMBER_FIELDS = _words("""
age amount area balance budget capacity charge cost credit depth discount distance duration energy fee fine gain grade
height hours income length level limit load loss margin mileage minutes points power premium price profit quantity rank
rate rating rent revenue risk salary score seats share size speed stock tax total value volume wage weight width year
""")

TEXT_FIELDS = _words("""
address author brand category channel city code color country county currency department district format genre group
label language model name origin owner payer phase region role sector shape source state status street style subject
team theme title type unit zone
""")
